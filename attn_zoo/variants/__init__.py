"""The zoo: one file per mechanism. A file in this folder is registered by existing."""
