"""The table of ops and the driver that holds every backend to it: `forge verify` and the tests."""

from forge.verify.case import Case
from forge.verify.cases import CASES
from forge.verify.cases_model import model_cases
from forge.verify.driver import Result, as_json, check, run

__all__ = ["CASES", "Case", "Result", "as_json", "check", "model_cases", "run"]
