"""What `meshfold bench zero-offload` is made of: cases, the model, contestants' processes, table and plot."""
