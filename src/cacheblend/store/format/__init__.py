"""The bytes of block files and manifests, and their checksums (docs/format.md). Folders, servers and buckets keep the
same bytes: a store of one kind can be copied to another. Knows bytes; does not know where they are kept."""
