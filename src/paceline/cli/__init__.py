"""The command line: one small module a verb, each loaded only when it is called."""

import sys


def main() -> int:
    if sys.argv[1:2] == ["run"] and not {"--help", "--dry-run"} & set(sys.argv):
        from paceline.backends import ahead

        ahead.begin()
    from paceline.cli import app

    return app.main()
