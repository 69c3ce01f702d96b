"""Quality measurements that use the package as an honest client."""
