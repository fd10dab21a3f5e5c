"""Problems: the bundled task, files in the public benchmarks' forms, reasoning-gym."""

from npr_controller.datasets.files import open_file
from npr_controller.datasets.generated import open_gym, open_multipart
from npr_controller.datasets.problem import Problem, ProblemSet
from npr_controller.datasets.stream import ProblemStream, derived_seed
from npr_controller.recipe import FileSource, MultipartSource, Source

__all__ = ["Problem", "ProblemSet", "ProblemStream", "derived_seed", "open_source"]


def open_source(source: Source) -> ProblemSet:
    """The problems of a recipe's source. Raises `NotFoundError` or `InvalidArgumentError` saying what to do."""
    if isinstance(source, FileSource):
        return open_file(source)
    if isinstance(source, MultipartSource):
        return open_multipart(source)
    return open_gym(source)
