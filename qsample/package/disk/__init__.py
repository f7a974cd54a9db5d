"""Files and folders: scratch space, locks, replacing, full disks, input from strangers, tensors in
files."""
