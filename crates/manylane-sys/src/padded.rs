//! Slices that share no cache line with other allocations.
//!
//! What a lane writes for each batch must not lie on a line that another lane reads or writes. The
//! allocator places small allocations of several lanes next to each other.

use std::ops::{Deref, DerefMut};

/// Bytes of padding at both ends: two lines, because CPUs prefetch them in pairs.
const PAD_BYTES: usize = 128;

/// Elements of padding at each end of a slice of `T`.
pub(crate) const fn padding<T>() -> usize {
    PAD_BYTES.div_ceil(size_of::<T>())
}

/// A boxed slice with unused elements at both ends.
#[derive(Debug)]
pub struct PaddedSlice<T>(Box<[T]>);

impl<T: Clone> PaddedSlice<T> {
    /// `len` copies of `value`.
    #[must_use]
    pub fn new(value: T, len: usize) -> Self {
        Self::from_fn(len, || value.clone())
    }
}

impl<T> PaddedSlice<T> {
    /// `len` elements that `make` returns.
    pub(crate) fn from_fn(len: usize, make: impl FnMut() -> T) -> Self {
        Self(std::iter::repeat_with(make).take(len + 2 * padding::<T>()).collect())
    }
}

impl<T: Clone + Default> Default for PaddedSlice<T> {
    fn default() -> Self {
        Self::new(T::default(), 0)
    }
}

impl<T> Deref for PaddedSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.0[padding::<T>()..self.0.len() - padding::<T>()]
    }
}

impl<T> DerefMut for PaddedSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        let end = self.0.len() - padding::<T>();
        &mut self.0[padding::<T>()..end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_surrounds_the_elements() {
        assert_eq!((padding::<u8>(), padding::<u64>(), padding::<[u8; 200]>()), (128, 16, 1));
        let mut slice = PaddedSlice::new(7_u64, 3);
        slice[2] = 8;
        assert_eq!(*slice, [7, 7, 8]);
        assert!(slice.0[..16].iter().chain(&slice.0[19..]).all(|&pad| pad == 7));
        assert_eq!(slice.0.len(), 3 + 2 * 16);
        assert!(PaddedSlice::<u8>::default().is_empty());
    }
}
