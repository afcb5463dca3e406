"""Jobs on real clusters, which all tests of this folder share and which end with the last one."""
