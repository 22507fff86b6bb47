"""Ranges that numbers of settings and options lie in, as types."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from agentrl.core.types import MAX_TEMPERATURE, MIN_TEMPERATURE

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
Temperature = Annotated[float, Ge(MIN_TEMPERATURE), Le(MAX_TEMPERATURE)]
TemperatureOrZero = Annotated[float, Ge(0), Le(MAX_TEMPERATURE)]
