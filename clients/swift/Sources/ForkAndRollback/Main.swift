import GRPCCore
import GRPCNIOTransportHTTP2
import GRPCProtobuf

/// Text as it comes, a fork and a rollback: `swift run ForkAndRollback [HOST] [PORT]`.
@main
struct ForkAndRollback {
    static func main() async throws {
        let arguments = CommandLine.arguments
        let host = arguments.count > 1 ? arguments[1] : "127.0.0.1"
        let port = arguments.count > 2 ? Int(arguments[2]) ?? 50051 : 50051
        try await withGRPCClient(
            transport: .http2NIOPosix(
                target: .dns(host: host, port: port),
                transportSecurity: .plaintext,  // .tls away from this machine
                serviceConfig: onlyUnavailable
            )
        ) { client in
            let inference = Kvfork_V1_InferenceService.Client(wrapping: client)
            do {
                try await tell(inference)
            } catch let error as RPCError {
                // The reason and details are typed: no text needs to be read.
                let status = try error.unpackGoogleRPCStatus()
                for detail in status?.details ?? [] {
                    if let info = detail.errorInfo {
                        print("\(info.reason): \(error.message) \(info.metadata)")
                    }
                }
                throw error
            }
        }
    }

    static func tell(_ inference: Kvfork_V1_InferenceService.Client<HTTP2ClientTransport.Posix>) async throws {
        var request = Kvfork_V1_GenerateRequest()
        request.input.chat.messages = [turn(.system, "Be brief."), turn(.user, "Name a colour.")]
        request.stopping.maxTokens = 32
        request.marks = [.with { $0.landmark = .promptEnd }]  // keep the state before the answer,
        request.save = Kvfork_V1_SnapshotOptions()  // and the one after it

        var prompt = Kvfork_V1_Snapshot()
        var end = Kvfork_V1_Snapshot()
        // Leaving the closure before the stream's end, and cancelling the task, cancel on the server.
        try await inference.generate(request) { response in
            for try await message in response.messages {
                switch message.event {
                case .delta(let delta): print(delta.text, terminator: "")
                case .marked(let marked): prompt = marked.snapshot
                case .finished(let finished):
                    end = finished.snapshot
                    print("\n\(finished.usage)")  // prompt = cached + recomputed + new
                default: break
                }
            }
        }

        var fork = Kvfork_V1_ForkRequest()
        fork.parent = prompt.name
        fork.branches = [.init(), .init()]  // two names for one state, nothing copied
        let children = try await inference.fork(fork).snapshots
        print(children.map(\.name))

        var rollback = Kvfork_V1_RollbackRequest()
        rollback.source = end.name
        rollback.tokenCount = prompt.tokenCount
        let back = try await inference.rollback(rollback)
        print(back.usage.recomputedTokens)  // the answer is gone, the prompt is not computed again
    }

    static func turn(_ role: Kvfork_V1_Role, _ text: String) -> Kvfork_V1_Message {
        .with {
            $0.role = role
            $0.parts = [.with { $0.text = text }]
        }
    }

    /// Only UNAVAILABLE is safe to repeat blindly, and gRPC repeats it only while no reply has begun.
    static let onlyUnavailable = ServiceConfig(
        methodConfig: [
            MethodConfig(
                names: ["InferenceService", "SnapshotService", "ServerService"].map {
                    MethodConfig.Name(service: "kvfork.v1.\($0)", method: "")
                },
                executionPolicy: .retry(
                    RetryPolicy(
                        maxAttempts: 4,
                        initialBackoff: .milliseconds(200),
                        maxBackoff: .seconds(3),
                        backoffMultiplier: 2.5,
                        retryableStatusCodes: [.unavailable]
                    )
                )
            )
        ]
    )
}
