//! The verifier's cost of the eBPF programs, and that it accepts every policy.
//!
//! A program that grows past its ceiling needs a review before the ceiling is raised, because old
//! kernels reject programs that are expensive to verify.

use aya::EbpfLoader;
use aya::programs::{Program, SkReuseport, Xdp};
use manylane_testbed::skip;
use manylane_tests::need_ebpf;

/// Instructions that the verifier may process for one policy, and for one XDP program.
const STEER_CEILING: u32 = 700;
const GENERATOR_CEILING: u32 = 2000;
/// IPv4 and IPv6, UDP and TCP, with and without tags: each is a way of its own.
const XDP_CEILING: u32 = 14_000;

fn may_load(test: &str) -> bool {
    skip::need_kernel(test, (5, 16), "counts of the verifier") && need_ebpf(test)
}

/// Instructions that the verifier processed.
fn verified(program: &mut Program) -> u32 {
    let info = match program {
        Program::SkReuseport(program) => {
            let program: &mut SkReuseport = program;
            program.load().unwrap();
            program.info().unwrap()
        }
        Program::Xdp(program) => {
            let program: &mut Xdp = program;
            program.load().unwrap();
            program.info().unwrap()
        }
        _ => panic!("a program of an unknown kind"),
    };
    info.verified_instruction_count().expect("Linux 5.16 says how much the verifier processed")
}

#[test]
fn loopback_steering_stays_under_its_ceiling_with_every_policy() {
    if !may_load("loopback_steering_stays_under_its_ceiling_with_every_policy") {
        return;
    }
    // The longest key; the policies in the order of `enum ml_policy`.
    let (offset, len) = (65_535_u32, 64_u32);
    for policy in 0..=5_u32 {
        let mut object = EbpfLoader::new()
            .btf(None)
            .override_global("ml_policy", &policy, true)
            .override_global("ml_key_offset", &offset, true)
            .override_global("ml_key_len", &len, true)
            .load(manylane_bpf::STEER)
            .unwrap();
        let count = verified(object.program_mut("ml_steer").unwrap());
        println!("policy {policy}: {count} instructions");
        assert!(count <= STEER_CEILING, "policy {policy}: {count} instructions");
    }
}

#[test]
fn loopback_the_generator_stays_under_its_ceiling() {
    if !may_load("loopback_the_generator_stays_under_its_ceiling") {
        return;
    }
    let mut object = EbpfLoader::new().load(manylane_bpf::GENERATOR).unwrap();
    let names: Vec<String> = object.programs().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(names.len(), 1);
    let count = verified(object.program_mut(&names[0]).unwrap());
    println!("generator: {count} instructions");
    assert!(count <= GENERATOR_CEILING, "{count} instructions");
}

#[test]
fn loopback_the_xdp_program_stays_under_its_ceiling() {
    if !may_load("loopback_the_xdp_program_stays_under_its_ceiling") {
        return;
    }
    for partial in [0_u8, 1] {
        for name in ["ml_take", "ml_take_pieces"] {
            let mut object = EbpfLoader::new()
                .btf(None)
                .override_global("ml_may_be_partial", &partial, true)
                .load(manylane_bpf::XDP)
                .unwrap();
            let count = verified(object.program_mut(name).unwrap());
            println!("{name}, partial {partial}: {count} instructions");
            assert!(count <= XDP_CEILING, "{name}: {count} instructions");
        }
    }
}
