//! Prefetches: their states, and what another process may have written into them.

use std::ptr;
use std::sync::atomic::Ordering;

use super::buffer::*;
use crate::shared::{memory, thread};

fn prefetch() -> &'static Prefetch {
    let prefetch = &memory::map::<Prefetch>(1, true).unwrap()[0];
    assert!(prefetch.init());
    prefetch
}

#[test]
fn a_prefetch_in_use_is_not_recovered() {
    let prefetch = prefetch();
    prefetch.filler.store(thread::holder_token(), Ordering::Relaxed);
    let filling = GENERATION | FILLING;
    prefetch.state.store(filling, Ordering::Relaxed);
    assert!(!prefetch.reset(thread::holder_token()));
    assert_eq!(prefetch.state.load(Ordering::Relaxed), filling);
    prefetch.filler.store(0, Ordering::Relaxed);
    let claimed = GENERATION | CLAIM | 1 << END_SHIFT | 1;
    prefetch.state.store(claimed, Ordering::Relaxed);
    assert!(!prefetch.reset(thread::holder_token()));
    assert_eq!(prefetch.state.load(Ordering::Relaxed), claimed);
}

#[test]
fn a_fill_started_before_a_drain_is_discarded() {
    let prefetch = prefetch();
    // The filler has died.
    let filling = GENERATION | FILLING;
    prefetch.state.store(filling, Ordering::Relaxed);
    assert!(prefetch.reset(thread::holder_token()));
    prefetch.publish(filling, 3);
    assert!(prefetch.is_idle());
    assert_ne!(prefetch.filler.load(Ordering::Relaxed), 0);
    prefetch.reopen();
    assert_eq!(prefetch.filler.load(Ordering::Relaxed), 0);
    // The next fill has another generation.
    assert_ne!((prefetch.state.load(Ordering::Relaxed) + GENERATION) | FILLING, filling);
}

/// Another process has written all of the memory that is shared.
#[test]
fn numbers_of_another_process_stay_within_the_prefetch() {
    let prefetch = prefetch();
    let headers = prefetch.headers.get();
    // SAFETY: a local copy of numbers; nothing fills.
    let named = || unsafe { (*headers).messages.map(|at| (at.msg_hdr.msg_name, at.msg_hdr.msg_iov)) };
    let before = named();
    // SAFETY: fork(2); the child makes one call only.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let first = ptr::from_ref(prefetch).cast_mut().cast::<u8>();
        // SAFETY: the child's own copy, and what it shares.
        unsafe {
            first.write_bytes(0x7f, size_of_val(&prefetch.headers));
            let shared = first.add(size_of_val(&prefetch.headers));
            shared.write_bytes(0x7f, size_of::<Prefetch>() - size_of_val(&prefetch.headers));
            libc::_exit(0);
        }
    }
    // SAFETY: waits for the child.
    unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    assert_eq!(named(), before);
    assert!(!prefetch.has_datagrams());
    assert_eq!(prefetch.claim(true), None);
    prefetch.state.store(GENERATION | 0xff << END_SHIFT, Ordering::Relaxed);
    let slots: Vec<_> = std::iter::from_fn(|| prefetch.claim(true)).collect();
    assert_eq!(slots, (0..PREFETCH_MAX).collect::<Vec<_>>());
    for slot in slots {
        let datagram = prefetch.datagram(slot);
        assert_eq!((datagram.name.len(), datagram.payload[0].len()), (SOCKADDR_LEN_MAX, HEAD_LEN));
        assert_eq!(datagram.payload[1].len(), TAIL_LEN);
    }
}
