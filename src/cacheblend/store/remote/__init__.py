"""Stores on other machines: `RemoteStore` keeps the contract, `RedisObjects` and `BucketObjects` move the bytes."""
