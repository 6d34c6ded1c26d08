"""Recognizes harmless start-up messages of frameworks, which `paceline run` hides by default."""

from __future__ import annotations

import re

_SOURCE = r"[\w./-]+\.(?:cc|cpp|cu|h):\d+\]"
# After the letter of a level. Frameworks never initialize the logging of absl, so its lines have no date and count
# seconds since 1970; lines of the user's own C++ code have a date.
_ABSL = rf"0000 00:00:\d{{10}}\.\d{{6}} +\d+ {_SOURCE}"
_OLD = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}"  # TensorFlow before 2.17
_OLD_SOURCE = rf"(?:tensorflow|external)/{_SOURCE}"
_NOISE = re.compile(
    "|".join(
        (
            r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
            rf"I{_ABSL}",
            rf"{_OLD}: I {_OLD_SOURCE}",
            r"To enable the following instructions: .*, in other operations, rebuild TensorFlow with",
            rf"(?:E{_ABSL}|{_OLD}: E {_OLD_SOURCE}) Unable to register cu\w+ factory",
            rf"[EW]{_ABSL} computation placer already registered",
        )
    )
)


def is_noise(text: str) -> bool:
    return _NOISE.match(text) is not None
