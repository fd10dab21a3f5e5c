"""Whether a server can be trusted with fork and join: its release, what is hooked in it, and how it was started.

Invariant: what is not known to work is refused, with a sentence that says what to do.
"""

from __future__ import annotations

import argparse
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from npr_sglang.errors import PluginError
from npr_sglang.releases import Release, installed


def check_release() -> Release:
    """The table's entry of the installed SGLang.

    Raises:
        PluginError: it has none, or something that it counts on is not in the server; the message names all of that.
    """
    release = installed()
    missing = [problem for target, names in release.targets.items() if (problem := _problem(target, names))]
    if missing:
        raise PluginError("SGLang is not as npr_sglang knows it: " + "; ".join(missing))
    return release


def _problem(target: str, names: tuple[str, ...]) -> str:
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        return f"{target} is gone ({error})"
    known = inspect.signature(inspect.unwrap(found)).parameters
    lacking = [name for name in names if name not in known]
    return f"{target} has no parameter {', '.join(lacking)}" if lacking else ""


def check_start(arguments: Sequence[str], *, has_plugin: bool) -> None:
    """Whether a server could be started with these arguments here. It looks at no model.

    Raises:
        PluginError: it could not. What begins with "argument --..." is about that argument.
    """
    if has_plugin:
        check_release()
    import torch  # noqa: PLC0415
    from sglang.srt.plugins import load_plugins  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    load_plugins()  # which tells the server's choices of the plug-in's own
    parser = _Parser()
    ServerArgs.add_cli_args(parser)
    asked = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    if asked.device == "cuda" and not gpus:
        raise PluginError("argument --device: it is cuda, and PyTorch finds no GPU here")
    if asked.device == "cuda" and asked.tp_size > gpus:
        raise PluginError(f"argument --tp-size: it is {asked.tp_size}, and PyTorch finds {gpus} GPUs here")


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, without pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise PluginError(message)


def check_server(context: Any) -> None:
    """Whether a server, whose cache is about to be made, has all of the plug-in and nothing that it can't work with.

    Args:
        context: the server's `TreeCacheBuildContext`.

    Raises:
        PluginError: naming what is wrong.
    """
    problems = [*_unhooked(), *_unsuitable(context)]
    if problems:
        raise PluginError("npr_sglang can't serve: " + "; ".join(problems))


def _unhooked() -> list[str]:
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415

    targets = [hook.target for hook in installed().hooks]
    return [f"its hook on {target} was not applied" for target in targets if target not in HookRegistry._patched]


def _unsuitable(context: Any) -> list[str]:
    from sglang.srt.runtime_context import get_schedule, get_spec  # noqa: PLC0415

    params = context.params
    found = {
        "a page size other than 1 (--page-size 1)": params.page_size != 1,
        "a disabled radix cache": context.disable_radix_cache,
        "sliding-window or hybrid models": context.is_hybrid_swa or context.is_hybrid_ssm,
        "a hierarchical cache": context.enable_hierarchical_cache,
        "speculative decoding": get_spec().speculative_algorithm is not None,
        "pipeline parallelism": params.pp_size > 1,
        "--schedule-policy dfs-weight": get_schedule().schedule_policy == "dfs-weight",
    }
    return [f"it does not work with {what}" for what, is_so in found.items() if is_so]


def main() -> int:
    """`python -m npr_sglang.check`: look at SGLang without a server; 1 if the plug-in can't work in it."""
    try:
        release = check_release()
    except PluginError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"npr_sglang finds all that it counts on: {len(release.targets)} targets\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
