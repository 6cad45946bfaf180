"""Running for long: what watches over a run, finds where a nan arose, stops it on request and goes on after a crash."""
