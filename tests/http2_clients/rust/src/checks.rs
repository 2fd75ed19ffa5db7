//! What is tried, by name.

use std::time::Duration;

use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use crate::Settings;
use crate::pick::{Fault, PIECE_BYTES, Pick};

const DUPLEX: BodySendMode = BodySendMode::FullDuplexStreamed;

pub const NAMES: [&str; 6] = ["picks", "body", "cancel", "tls", "keepalive", "goaway"];

/// One of `NAMES`; → what it found, in words.
pub async fn run(name: &str, settings: &Settings) -> Result<String, Fault> {
    match name {
        "picks" => picks(settings).await,
        "body" => body(settings).await,
        "cancel" => cancelled(settings).await,
        "tls" => over_tls(settings).await,
        "keepalive" => keepalive(settings).await,
        "goaway" => goaway(settings).await,
        _ => Err(format!("no check {name:?}").into()),
    }
}

fn endpoint(settings: &Settings) -> Result<Endpoint, Fault> {
    Ok(Endpoint::from_shared(format!("http://{}", settings.target))?)
}

fn prompt(number: usize, size: usize) -> Vec<u8> {
    format!(r#"{{"model": "tiny", "prompt": "{number} {}"}}"#, "x".repeat(size)).into_bytes()
}

async fn one(settings: &Settings, channel: &Channel, mode: BodySendMode, body: &[u8]) -> Result<String, Fault> {
    Pick::open(channel, mode).await?.finish(body, &settings.endpoints).await
}

/// `count` picks, `width` at a time.
async fn many(
    settings: &Settings,
    channel: &Channel,
    mode: BodySendMode,
    count: usize,
    width: usize,
) -> Result<(), Fault> {
    let mut workers = JoinSet::new();
    for worker in 0..width {
        let (channel, endpoints) = (channel.clone(), settings.endpoints.clone());
        workers.spawn(async move {
            for number in (worker..count).step_by(width) {
                Pick::open(&channel, mode).await?.finish(&prompt(number, number % 300), &endpoints).await?;
            }
            Ok::<(), Fault>(())
        });
    }
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    Ok(())
}

async fn picks(settings: &Settings) -> Result<String, Fault> {
    let channel = endpoint(settings)?.connect().await?;
    for mode in [DUPLEX, BodySendMode::Streamed, BodySendMode::Buffered] {
        many(settings, &channel, mode, 1000, 50).await?;
    }
    Ok("1,000 in each of three body modes on 50 streams; headers and metadata name the same endpoint".into())
}

async fn body(settings: &Settings) -> Result<String, Fault> {
    let channel = endpoint(settings)?.connect().await?;
    let sent = prompt(0, 1 << 20);
    for mode in [DUPLEX, BodySendMode::Streamed] {
        one(settings, &channel, mode, &sent).await?;
    }
    Ok(format!("{} bytes in pieces of {PIECE_BYTES} went and came back whole", sent.len()))
}

/// Gives up streams at which the picker waits for the rest of a body, half of them after an answer to their headers.
async fn cancelled(settings: &Settings) -> Result<String, Fault> {
    let channel = endpoint(settings)?.connect().await?;
    for number in 0..100 {
        let answered = number % 2 == 0;
        let mut pick = Pick::open(&channel, if answered { BodySendMode::Streamed } else { DUPLEX }).await?;
        if answered {
            pick.read().await?;
        }
        pick.send_body(&prompt(number, 1000)[..500], false).await?;
        pick.cancel();
    }
    many(settings, &channel, DUPLEX, 100, 10).await?;
    Ok("100 streams in the middle of their bodies; the connection went on".into())
}

async fn over_tls(settings: &Settings) -> Result<String, Fault> {
    let tls =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&settings.authority)).domain_name("localhost");
    let endpoint = Endpoint::from_shared(format!("https://{}", settings.tls_target))?;
    let channel = endpoint.tls_config(tls)?.connect().await?;
    many(settings, &channel, DUPLEX, 100, 10).await?;
    Ok("100 picks with the picker's certificate verified".into())
}

/// Holds two connections: one pings every second, the other says nothing until the picker pings it.
async fn keepalive(settings: &Settings) -> Result<String, Fault> {
    let pings = endpoint(settings)?
        .http2_keep_alive_interval(Duration::from_secs(1))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true);
    tokio::try_join!(held(settings, pings), held(settings, endpoint(settings)?))?;
    Ok(format!("{:?} with pings of the client, and as long without", settings.hold))
}

/// A call that is under way all the time shows that it is the same connection.
async fn held(settings: &Settings, endpoint: Endpoint) -> Result<(), Fault> {
    let channel = endpoint.connect().await?;
    let pick = Pick::open(&channel, DUPLEX).await?;
    sleep(settings.hold).await;
    pick.finish(&prompt(0, 100), &settings.endpoints).await?;
    many(settings, &channel, DUPLEX, 10, 1).await
}

/// Has the picker stopped in the middle of calls.
async fn goaway(settings: &Settings) -> Result<String, Fault> {
    let channel = endpoint(settings)?.connect().await?;
    let mut under_way = Vec::new();
    for _ in 0..20 {
        under_way.push(Pick::open(&channel, DUPLEX).await?);
    }
    one(settings, &channel, DUPLEX, &prompt(0, 100)).await?; // answered behind them: the picker has seen them all
    println!("stop");
    while endpoint(settings)?.connect().await.is_ok() {
        sleep(Duration::from_millis(10)).await;
    }
    for pick in under_way {
        let finished = pick.finish(&prompt(0, 1000), &settings.endpoints).await;
        finished.map_err(|fault| format!("a call under way: {fault}"))?;
    }
    while one(settings, &channel, DUPLEX, &prompt(0, 1000)).await.is_err() {
        sleep(Duration::from_millis(10)).await;
    }
    Ok("20 calls under way were finished, a new channel was refused, the old one connected again".into())
}
