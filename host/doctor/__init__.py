"""What is wrong with a host, with its folders, and with the ways between hosts: looked at by
processes of their own, for `oobleck doctor`."""
