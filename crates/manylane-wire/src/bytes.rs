//! Access to slices at fixed offsets, after a check of their length.

use crate::error::{Error, Layer, Result};

/// The first `N` bytes and the rest.
pub(crate) fn split<const N: usize>(bytes: &[u8], layer: Layer) -> Result<(&[u8; N], &[u8])> {
    bytes.split_first_chunk().ok_or(Error::Truncated { layer, needed: N, there: bytes.len() })
}

/// As [`split`], mutable.
pub(crate) fn split_mut<const N: usize>(bytes: &mut [u8], layer: Layer) -> Result<(&mut [u8; N], &mut [u8])> {
    let there = bytes.len();
    bytes.split_first_chunk_mut().ok_or(Error::Truncated { layer, needed: N, there })
}

/// The first `needed` bytes.
pub(crate) fn take(bytes: &[u8], needed: usize, layer: Layer) -> Result<&[u8]> {
    bytes.get(..needed).ok_or(Error::Truncated { layer, needed, there: bytes.len() })
}
