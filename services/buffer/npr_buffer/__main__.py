"""`npr-buffer`: serves until SIGTERM. Configuration comes from the environment (`NPR_`, `NPR_BUFFER_`)."""

from npr_buffer.service import BufferService
from npr_common.rpc import run


def main() -> None:
    """Runs the service."""
    run(BufferService)


if __name__ == "__main__":
    main()
