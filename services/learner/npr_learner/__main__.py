"""`npr-learner`: serves until SIGTERM. Configuration comes from the environment (`NPR_`, `NPR_LEARNER_`)."""

from npr_common.rpc import run
from npr_learner.service import LearnerService


def main() -> None:
    """Runs the service."""
    run(LearnerService)


if __name__ == "__main__":
    main()
