"""What all settings from outside have in common: frozen, complete, and strict about unknown keys."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from echelon.errors import ConfigError, EchelonError
from echelon.inputs import described, plain, problems_of, shown

Quantization = Literal["int8", "int4"]  # of weights, in settings of several kinds


class Settings(BaseModel):
    """Base of every object a user fills in: immutable, unknown keys refused, one-line errors that name the remedy. No type stands in for
    another, but numbers of NumPy and PyTorch for Python's own, and paths for text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
    error: ClassVar[type[EchelonError]] = ConfigError

    def __init__(self, /, **values: Any) -> None:
        given = {key: plain(value) for key, value in values.items()}
        try:
            super().__init__(**given)
        except ValidationError as failure:
            raise self.error(self._explain(failure, given)) from None

    @classmethod
    def _explain(cls, failure: ValidationError, given: dict[str, Any]) -> str:
        """Every problem, in one line; the value of a field with `repr=False` is secret."""
        lines, unknown = [], []
        for place, problems in problems_of(failure, given).items():
            field = cls.model_fields.get(re.split(r"[.[]", place)[0])
            if problems[0]["type"] == "extra_forbidden":
                unknown.append(shown(place))
            elif problems[0]["type"] == "missing" and field is not None:
                lines.append(f"{cls.__name__}.{place} is missing; give it: {field.description}")
            else:
                lines.append(described(place, problems, cls.__name__, is_secret=field is not None and not field.repr))
        if unknown:
            lines.append(f"{cls.__name__} has no key {' or '.join(unknown)}; known keys: {', '.join(cls.model_fields)}")
        return "; ".join(lines)
