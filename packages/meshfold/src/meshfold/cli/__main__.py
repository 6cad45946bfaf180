"""``python -m meshfold.cli`` is ``meshfold``."""

import sys

from meshfold.cli import main

if __name__ == "__main__":
    sys.exit(main())
