"""Stand-ins for the services that need a model; buffer, Redis and gRPC are real in the controller's tests."""

from npr_controller.testing.learner import ScriptedLearner
from npr_controller.testing.process import ServiceProcess
from npr_controller.testing.worker import Script, work

__all__ = ["Script", "ScriptedLearner", "ServiceProcess", "work"]
