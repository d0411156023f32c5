"""New weights into the servers, by shared memory, process group or NIXL."""
