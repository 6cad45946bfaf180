"""The loop of ``meshfold train`` and ``meshfold demo``, its display and its output."""
