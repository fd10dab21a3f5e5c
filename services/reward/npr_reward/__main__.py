"""`npr-reward`: runs the service. Imports nothing at the top: sandbox processes import this module again."""


def main() -> None:
    """Serves until SIGTERM; settings come from the environment (`NPR_`, `NPR_REWARD_`)."""
    from npr_common.rpc.server import run  # noqa: PLC0415
    from npr_reward.service import RewardService  # noqa: PLC0415

    run(RewardService)


if __name__ == "__main__":
    main()
