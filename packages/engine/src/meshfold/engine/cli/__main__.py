"""``python -m meshfold.engine.cli`` is ``meshfold``."""

import sys

from meshfold.engine.cli import main

if __name__ == "__main__":
    sys.exit(main())
