//! Comparison of sequence numbers, which wrap (RFC 9293, section 3.4).

/// True if `a` comes before `b`.
#[inline]
pub(crate) const fn is_before(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() < 0
}

/// The later one of two.
#[inline]
pub(crate) const fn later(a: u32, b: u32) -> u32 {
    if is_before(a, b) { b } else { a }
}
