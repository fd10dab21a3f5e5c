"""The controller's process."""

from npr_common.config import Addresses
from npr_common.rpc import run
from npr_controller.service import ControllerService
from npr_controller.settings import ControllerSettings


def main() -> None:
    """Serves until SIGTERM."""
    run(lambda: ControllerService(ControllerSettings(), Addresses()))


if __name__ == "__main__":
    main()
