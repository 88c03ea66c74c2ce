"""Who is who: keys, certificates, an authority, and pinned fingerprints."""
