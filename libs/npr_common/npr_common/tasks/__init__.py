"""Bundled task families: problems generated on the spot, so that a run needs no data set."""

from npr_common.tasks.multipart import Family, MultipartTask, Part, Problem, Split, solution_text

__all__ = ["Family", "MultipartTask", "Part", "Problem", "Split", "solution_text"]
