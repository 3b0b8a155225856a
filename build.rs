//! Tells the program which compiler built it, for `agentloop_build_info`.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RUSTC");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(compiler).arg("--version").output().ok();
    let text = output
        .and_then(|output| String::from_utf8(output.stdout).ok())
        .unwrap_or_default();
    // `rustc 1.92.0 (ded5c06cf 2025-12-08)`
    let version = text.split_whitespace().nth(1).unwrap_or("unknown");
    println!("cargo::rustc-env=AGENTLOOP_RUSTC={version}");
}
