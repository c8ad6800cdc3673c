//! Compiles each `*.bpf.c` of this folder with clang.
//!
//! clang and the headers of libbpf are not on every machine, and nothing in the library needs eBPF
//! to work: without them the crate builds with no programs, says so once, and every user of a
//! program reports the same reason at run time.

#![allow(clippy::expect_used, reason = "a build script reports by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".into());
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed=MANYLANE_REQUIRE_EBPF");
    println!("cargo:rerun-if-changed=../abi");
    println!("cargo:rerun-if-changed=.");

    let mut sources: Vec<PathBuf> = fs::read_dir(".")
        .expect("the folder of this crate can be read")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.to_string_lossy().ends_with(".bpf.c"))
        .collect();
    sources.sort();

    let mut arms = String::new();
    let mut missing = None;
    for source in &sources {
        let name = source.file_name().expect("a file").to_string_lossy().replace(".bpf.c", "");
        let object = out.join(format!("{name}.bpf.o"));
        match compile(&clang, source, &object) {
            Ok(()) => arms.push_str(&format!(
                "        {name:?} => Some(aligned!(concat!(env!(\"OUT_DIR\"), \"/{name}.bpf.o\"))),\n"
            )),
            Err(why) => missing = Some(why),
        }
    }
    if let Some(why) = &missing {
        assert!(env::var_os("MANYLANE_REQUIRE_EBPF").is_none(), "eBPF programs do not build: {why}");
        println!("cargo:warning=built without eBPF programs: {}", why.lines().next().unwrap_or(why));
    }
    let table = format!(
        "fn compiled(name: &str) -> Option<&'static [u8]> {{\n    match name {{\n{arms}        _ => None,\n    }}\n}}\n\
         const WHY_MISSING: Option<&str> = {missing:?};\n"
    );
    fs::write(out.join("objects.rs"), table).expect("OUT_DIR can be written");
}

fn compile(clang: &str, source: &Path, object: &Path) -> Result<(), String> {
    // The multiarch folder holds asm/types.h on Debian and Ubuntu; elsewhere it does not exist and
    // is ignored.
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let include = format!("-I/usr/include/{arch}-linux-gnu");
    let run = Command::new(clang)
        .args([
            "-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-I../abi", &include,
        ])
        .args(["-fdebug-prefix-map=..=manylane", "-c"])
        .arg(source)
        .arg("-o")
        .arg(object)
        .output();
    match run {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => {
            Err(format!("{clang} failed on {}:\n{}", source.display(), String::from_utf8_lossy(&done.stderr)))
        }
        Err(err) => Err(format!("{clang} cannot be run ({err}): install clang and libbpf-dev, or set CLANG")),
    }
}
