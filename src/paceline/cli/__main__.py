"""`python -m paceline.cli`."""

import sys

from paceline.cli import main

sys.exit(main())
