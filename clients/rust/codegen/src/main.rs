//! `codegen DESCRIPTORS FOLDER`: messages and client stubs from a file descriptor set, so that no protoc is needed here.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1).map(PathBuf::from);
    let (described, folder) = match (arguments.next(), arguments.next()) {
        (Some(described), Some(folder)) => (described, folder),
        _ => return Err("usage: codegen DESCRIPTORS FOLDER".into()),
    };
    let files = prost_types::FileDescriptorSet::decode(fs::read(described)?.as_slice())?;
    tonic_prost_build::configure()
        .build_server(false)
        .emit_rerun_if_changed(false)
        .out_dir(folder)
        .compile_fds(files)?;
    Ok(())
}
