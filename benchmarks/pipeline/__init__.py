"""The parts of `meshfold bench pipeline`."""
