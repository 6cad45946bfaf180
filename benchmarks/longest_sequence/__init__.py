"""The parts of `meshfold bench longest-sequence`."""
