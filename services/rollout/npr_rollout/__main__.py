"""`npr-rollout`: serves until SIGTERM. Configuration comes from the environment (`NPR_`, `NPR_ROLLOUT_`)."""

from npr_common.rpc import run
from npr_rollout.service import RolloutService


def main() -> None:
    """Runs the service."""
    run(RolloutService)


if __name__ == "__main__":
    main()
