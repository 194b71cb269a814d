"""The command line: `python -m amir_kernels.inspect --help`."""

import sys

from . import main

sys.exit(main())
