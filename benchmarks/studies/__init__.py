"""Studies: measurements that a decision rests on, kept so that it can be checked again. See README.md."""
