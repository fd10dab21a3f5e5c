"""Where a local stack keeps its files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STATE_DIR_VARIABLE = "NPR_STATE_DIR"


def default_state_dir() -> Path:
    """`NPR_STATE_DIR`, else `.npr` in the working directory."""
    return Path(os.environ.get(STATE_DIR_VARIABLE) or ".npr")


@dataclass(frozen=True)
class StateDir:
    """The folder of one local stack. Two folders are two stacks that know nothing of each other."""

    root: Path

    @classmethod
    def at(cls, path: Path | None) -> StateDir:
        """The state directory at `path`, or at the default place, as an absolute path."""
        return cls((path or default_state_dir()).absolute())

    @property
    def state_file(self) -> Path:
        return self.root / "stack.json"

    @property
    def wanted_file(self) -> Path:
        """Which components the user asked for; written by `npr up`, read by the supervisor."""
        return self.root / "wanted.json"

    @property
    def command_lock(self) -> Path:
        """Held by `npr up` and `npr down` while they act, so that they follow one another."""
        return self.root / "command.lock"

    @property
    def supervisor_lock(self) -> Path:
        """Held by the supervisor for its whole life."""
        return self.root / "supervisor.lock"

    @property
    def supervisor_log(self) -> Path:
        return self.log_file("supervisor")

    @property
    def valkey_folder(self) -> Path:
        return self.root / "valkey"

    @property
    def policy_store_url(self) -> str:
        return (self.root / "policies").as_uri()

    @property
    def cache_folder(self) -> Path:
        return self.root / "cache"

    def log_file(self, component: str) -> Path:
        return self.root / "logs" / f"{component}.log"

    def address_file(self, component: str) -> Path:
        """Where the component writes `host:port` after it is bound."""
        return self.root / "addresses" / component

    def create(self) -> None:
        """Makes the folders; harmless when they are there.

        They are the owner's alone: Valkey's file holds prompts and answers.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.root / "logs", self.root / "addresses", self.valkey_folder, self.cache_folder):
            folder.mkdir(exist_ok=True)
