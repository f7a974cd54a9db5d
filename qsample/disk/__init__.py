"""Files and folders of any owner: scratch space, publishing, full disks, input from strangers."""
