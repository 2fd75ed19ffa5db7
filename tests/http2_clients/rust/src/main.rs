//! Asks an endpoint picker by tonic, and says in one line for each check what it found.
//!
//! It is run by tests/support/http2_clients.py, which stops the picker when a line says "stop", and starts it again.

mod checks;
mod pick;

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;
use std::time::Duration;

use checks::{NAMES, run};

/// Where the pickers are, and what they may choose from.
pub struct Settings {
    /// host:port
    pub target: String,
    /// host:port of a picker with TLS
    pub tls_target: String,
    /// PEM of the certificate that it shows
    pub authority: String,
    /// host:port of each that both may choose
    pub endpoints: HashSet<String>,
    /// How long keepalive holds a connection
    pub hold: Duration,
}

const LIMIT: Duration = Duration::from_secs(120);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut flags = flags();
    let mut flag = |name: &str| flags.remove(name).unwrap_or_default();
    let only: HashSet<String> = words(&flag("only"));
    let settings = Settings {
        target: flag("target"),
        tls_target: flag("tls-target"),
        authority: std::fs::read_to_string(flag("ca")).unwrap_or_default(),
        endpoints: words(&flag("endpoints")),
        hold: Duration::from_secs(flag("hold").trim_end_matches('s').parse().unwrap_or(65)),
    };
    let mut status = ExitCode::SUCCESS;
    for name in NAMES {
        if !only.is_empty() && !only.contains(name) {
            continue;
        }
        match tokio::time::timeout(LIMIT, run(name, &settings)).await {
            Ok(Ok(found)) => println!("ok {name}: {found}"),
            Ok(Err(fault)) => {
                println!("FAILED {name}: {fault}");
                status = ExitCode::FAILURE;
            }
            Err(_) => {
                println!("FAILED {name}: not within {LIMIT:?}");
                status = ExitCode::FAILURE;
            }
        }
    }
    status
}

/// `--name value` …
fn flags() -> HashMap<String, String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    arguments.chunks_exact(2).map(|pair| (pair[0].trim_start_matches('-').to_owned(), pair[1].clone())).collect()
}

fn words(text: &str) -> HashSet<String> {
    text.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect()
}
