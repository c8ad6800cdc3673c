//! NUMA memory: selects the nodes of pages that a thread touches first.

use std::io;

/// Size of a node mask: the maximum of Linux.
const NODES_MAX: usize = 1024;
const WORD_BITS: usize = libc::c_ulong::BITS as usize;
type NodeMask = [libc::c_ulong; NODES_MAX / WORD_BITS];
/// One more, because the kernel subtracts one from the number of bits.
const MASK_BITS: libc::c_ulong = NODES_MAX as libc::c_ulong + 1;

/// Binds all memory that the calling thread touches first to `nodes`; inherited by threads that it
/// starts. Existing pages are not moved. Linux 2.6.7, CONFIG_NUMA.
///
/// # Errors
/// `EINVAL` for a node that does not exist or has no memory, `ENOSYS` in a kernel without NUMA,
/// `EPERM` in some containers.
pub fn bind_memory(nodes: &[usize]) -> io::Result<()> {
    let mut mask: NodeMask = [0; NODES_MAX / WORD_BITS];
    for &node in nodes {
        let word =
            mask.get_mut(node / WORD_BITS).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        *word |= 1 << (node % WORD_BITS);
    }
    // SAFETY: the kernel reads NODES_MAX bits of `mask`, which has that many and lives across the
    // call.
    let ret = unsafe { libc::syscall(libc::SYS_set_mempolicy, libc::MPOL_BIND, mask.as_ptr(), MASK_BITS) };
    crate::check(ret as libc::c_int)?;
    Ok(())
}

/// The nodes that the calling thread's memory is bound to; none if it is not bound.
///
/// # Errors
/// As for [`bind_memory`].
pub fn bound_nodes() -> io::Result<Vec<usize>> {
    let (mut mode, mut mask): (libc::c_int, NodeMask) = (0, [0; NODES_MAX / WORD_BITS]);
    let nowhere = std::ptr::null::<libc::c_void>();
    // SAFETY: the kernel writes an int to `mode` and NODES_MAX bits to `mask`, both of which live
    // across the call; without flags it takes no address.
    let ret = unsafe {
        libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), MASK_BITS, nowhere, 0)
    };
    crate::check(ret as libc::c_int)?;
    let set = |node: &usize| mode == libc::MPOL_BIND && mask[node / WORD_BITS] >> (node % WORD_BITS) & 1 == 1;
    Ok((0..NODES_MAX).filter(set).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bound_for_a_thread_and_those_it_starts() {
        let seen = std::thread::spawn(|| {
            if let Err(err) = bind_memory(&[0]) {
                eprintln!("skipped: cannot bind memory ({err})");
                return None;
            }
            let own = bound_nodes().unwrap();
            let child = std::thread::spawn(|| bound_nodes().unwrap()).join().unwrap();
            Some((own, child))
        });
        if let Some(seen) = seen.join().unwrap() {
            assert_eq!(seen, (vec![0], vec![0]));
            // The thread that started it is unaffected.
            assert_eq!(bound_nodes().unwrap(), Vec::<usize>::new());
        }
    }

    #[test]
    fn an_absent_numa_node_is_refused() {
        let refused = |node| bind_memory(&[node]).unwrap_err().raw_os_error().unwrap();
        assert_eq!(refused(NODES_MAX), libc::EINVAL);
        assert!([libc::EINVAL, libc::ENOSYS, libc::EPERM].contains(&refused(NODES_MAX - 1)));
    }
}
