"""`python -m service`: the same as the `kvfork` command."""

import sys

from service.cli import main

sys.exit(main())
