"""GSM8K: word problems whose answer is a number, judged in plain Python.

The labels of the data set end with ``#### 72``. An answer earns 1 if the last number in it is that one, and anything else earns 0.
The questions come from the data set that the configuration names.
"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def reward(completion: str, label: str) -> float:
    """Compare the last number of the answer with that of the label."""
    found, wanted = NUMBER.findall(completion), NUMBER.findall(label)
    return float(bool(found) and _value(found[-1]) == _value(wanted[-1]))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
