//! One request on a stream of its own, as Envoy sends it in a body mode.

use std::collections::HashSet;
use std::error::Error;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
    body_mutation::Mutation, external_processor_client::ExternalProcessorClient, processing_request::Request,
    processing_response::Response,
};
use envoy_types::pb::google::protobuf::{Struct, value::Kind};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

pub type Fault = Box<dyn Error + Send + Sync>;

const DESTINATION: &str = "x-gateway-destination-endpoint";
const NAMESPACE: &str = "envoy.lb";
pub const PIECE_BYTES: usize = 62_000;
/// Envoy takes no longer piece of a streamed body.
const MOST_BYTES: usize = 64 * 1024;

/// The picker begins its answer with the first message, so that the call is awaited beside what it is sent.
enum Answers {
    Awaited(JoinHandle<Result<Streaming<ProcessingResponse>, Status>>),
    Begun(Box<Streaming<ProcessingResponse>>),
}

pub struct Pick {
    requests: Option<mpsc::Sender<ProcessingRequest>>,
    answers: Answers,
    mode: BodySendMode,
    header: String,
    metadata: String,
    returned: Vec<u8>,
    ended: bool,
}

impl Pick {
    /// Sends the headers.
    pub async fn open(channel: &Channel, mode: BodySendMode) -> Result<Self, Fault> {
        let (requests, receiver) = mpsc::channel(4);
        let mut client = ExternalProcessorClient::new(channel.clone());
        let call = tokio::spawn(async move {
            client.process(ReceiverStream::new(receiver)).await.map(tonic::Response::into_inner)
        });
        let mut pick = Pick {
            requests: Some(requests),
            answers: Answers::Awaited(call),
            mode,
            header: String::new(),
            metadata: String::new(),
            returned: Vec::new(),
            ended: false,
        };
        let headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":authority", "models.example"),
            (":path", "/v1/completions"),
            ("content-type", "application/json"),
        ]
        .map(|(key, value)| HeaderValue { key: key.into(), raw_value: value.into(), ..Default::default() });
        let headers = HttpHeaders { headers: Some(HeaderMap { headers: headers.into() }), ..Default::default() };
        pick.send(ProcessingRequest {
            request: Some(Request::RequestHeaders(headers)),
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: mode.into(),
                response_body_mode: mode.into(),
                ..Default::default()
            }),
            ..Default::default()
        })
        .await?;
        Ok(pick)
    }

    /// Says why the stream ended where nothing can be sent any more.
    async fn send(&mut self, message: ProcessingRequest) -> Result<(), Fault> {
        let requests = self.requests.as_ref().ok_or("the stream is closed")?;
        if requests.send(message).await.is_err() {
            self.next().await?;
            return Err("the stream takes nothing more".into());
        }
        Ok(())
    }

    pub async fn send_body(&mut self, body: &[u8], end_of_stream: bool) -> Result<(), Fault> {
        let body = HttpBody { body: body.to_vec(), end_of_stream, ..Default::default() };
        self.send(ProcessingRequest { request: Some(Request::RequestBody(body)), ..Default::default() }).await
    }

    async fn next(&mut self) -> Result<Option<ProcessingResponse>, Fault> {
        loop {
            match &mut self.answers {
                Answers::Awaited(call) => {
                    let begun = call.await??;
                    self.answers = Answers::Begun(Box::new(begun));
                }
                Answers::Begun(answers) => return Ok(answers.message().await?),
            }
        }
    }

    /// Takes one answer.
    pub async fn read(&mut self) -> Result<(), Fault> {
        let answer = self.next().await?.ok_or("the stream ended before its answers")?;
        let common = match answer.response {
            Some(Response::RequestHeaders(part)) => part.response.unwrap_or_default(),
            Some(Response::RequestBody(part)) => part.response.unwrap_or_default(),
            other => return Err(format!("no answer to a request: {other:?}").into()),
        };
        if let Some(found) = answer.dynamic_metadata.as_ref().and_then(chosen_in) {
            self.metadata = found;
        }
        self.take(common)
    }

    fn take(&mut self, common: CommonResponse) -> Result<(), Fault> {
        for option in common.header_mutation.unwrap_or_default().set_headers {
            let header = option.header.unwrap_or_default();
            if header.key.eq_ignore_ascii_case(DESTINATION) {
                self.header = String::from_utf8(header.raw_value.to_vec())?;
            }
        }
        if let Some(Mutation::StreamedResponse(piece)) = common.body_mutation.unwrap_or_default().mutation {
            if piece.body.len() > MOST_BYTES {
                return Err(format!("a piece of {} bytes", piece.body.len()).into());
            }
            self.returned.extend_from_slice(&piece.body);
            self.ended |= piece.end_of_stream;
        }
        Ok(())
    }

    /// Sends the body, reads all answers, and sees the stream end well; → the chosen endpoint.
    pub async fn finish(mut self, body: &[u8], allowed: &HashSet<String>) -> Result<String, Fault> {
        let size = if self.mode == BodySendMode::Buffered { body.len() } else { PIECE_BYTES };
        if self.mode == BodySendMode::FullDuplexStreamed {
            for piece in body.chunks(size) {
                self.send_body(piece, false).await?;
            }
            self.send_body(b"", true).await?;
            while !self.ended {
                self.read().await?;
            }
            if self.returned != body {
                return Err(format!("{} bytes came back of {}, or others", self.returned.len(), body.len()).into());
            }
        } else {
            self.read().await?;
            let pieces = body.chunks(size);
            let last = pieces.len() - 1;
            for (at, piece) in pieces.enumerate() {
                self.send_body(piece, at == last).await?;
                self.read().await?;
            }
        }
        self.requests = None;
        if let Some(more) = self.next().await? {
            return Err(format!("{more:?} instead of the stream's end").into());
        }
        let Pick { mode, header, metadata, .. } = self;
        if header.is_empty() || header != metadata {
            return Err(format!("{mode:?}: header {header:?}, metadata {metadata:?}").into());
        }
        let first = header.split(',').next().unwrap_or_default();
        if !allowed.contains(first) {
            return Err(format!("{first:?} is no endpoint").into());
        }
        Ok(first.to_owned())
    }

    /// Resets the stream.
    pub fn cancel(self) {
        if let Answers::Awaited(call) = &self.answers {
            call.abort();
        }
    }
}

fn chosen_in(metadata: &Struct) -> Option<String> {
    let Some(Kind::StructValue(inner)) = &metadata.fields.get(NAMESPACE)?.kind else { return None };
    match &inner.fields.get(DESTINATION)?.kind {
        Some(Kind::StringValue(found)) => Some(found.clone()),
        _ => None,
    }
}
