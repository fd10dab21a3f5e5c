"""Settings from the environment, and those that every service reads: where the other services are (prefix `NPR_`)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from npr_common.errors import FailedPreconditionError

WRONG_SETTINGS_EXIT_CODE = 2
"""Of a service whose settings are wrong: starting it again would change nothing."""


class WrongSettingsError(FailedPreconditionError):
    """What is wrong with each variable."""

    default_reason = "WRONG_SETTINGS"

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in variables.items()))
        self.variables = dict(variables)


class Settings(BaseSettings):
    """Base of all settings. Values that are wrong raise a `WrongSettingsError` that names their variables."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # The first fault of each: what follows it in a list or a union tells no more.
            faults = {str(fault["loc"][0]): fault["msg"] for fault in reversed(error.errors()) if fault["loc"]}
            raise WrongSettingsError({self._variable(name): why for name, why in reversed(faults.items())}) from error
        except SettingsError as error:  # a list that is no JSON; only the message names the field
            named = re.search(r'field "(\w+)"', str(error))
            raise WrongSettingsError({self._variable(named[1] if named else ""): "Input should be JSON"}) from error

    @classmethod
    def _variable(cls, field: str) -> str:
        return f"{cls.model_config.get('env_prefix', '')}{field}".upper()


class Addresses(Settings):
    """Targets of the services and of the policy store. A service reads those it needs."""

    model_config = SettingsConfigDict(env_prefix="NPR_", frozen=True, extra="ignore")

    buffer_address: str = Field(default="127.0.0.1:7301", description="gRPC target of the buffer")
    reward_address: str = Field(default="127.0.0.1:7302", description="gRPC target of the reward service")
    rollout_address: str = Field(default="127.0.0.1:7303", description="gRPC target of the rollout service")
    learner_address: str = Field(default="127.0.0.1:7304", description="gRPC target of the learner")
    controller_address: str = Field(default="127.0.0.1:7305", description="gRPC target of the controller")
    policy_store_url: str = Field(default="file://.npr/policies", description="fsspec URL of the policy store")
    cache_dir: Path = Field(default=Path(".npr/cache"), description="local copies of policies")
