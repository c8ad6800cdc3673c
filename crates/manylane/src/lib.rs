//! See the manifest.
