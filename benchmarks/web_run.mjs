// One run of benchmarks/web.py, in Node or in a browser: load, continue a prompt greedily or by top-k, and say the times.
//
// Node: node benchmarks/web_run.mjs JOB, with JOB as JSON; the result is a line of JSON. A browser imports `run`.
const isNode = typeof process !== "undefined" && Boolean(process.versions?.node);

/**
 * Run a job: { system: "qsample" | "transformers.js", at, modules, device, threads, prompt: [ids], tokens, params }.
 * `at` is the folder or the address of the package or the model; `modules` where the libraries are, by name.
 * Returns { version, ms, firstMs, ids }: milliseconds a token after the first, on average, and of the prompt.
 */
export async function run(job) {
  const open = job.system === "qsample" ? openQsample : openTransformers;
  const { version, generate } = await open(job);
  await generate(Math.min(8, job.tokens)); // kernels are prepared, shaders compiled
  const times = [performance.now()];
  const ids = await generate(job.tokens, () => times.push(performance.now()));
  // All of them together: on a GPU, qsample reads several tokens at once.
  const ms = (times.at(-1) - times[1]) / (times.length - 2);
  return { version, ms, firstMs: times[1] - times[0], ids };
}

async function openQsample({ at, modules, device, threads, prompt, params }) {
  const { load } = await import(modules.qsample);
  const model = await load(at, { device, ...(threads ? { threads } : {}) });
  const options = { ...params, seed: 1, eosTokenId: null };
  return {
    version: "qsample",
    async generate(tokens, onToken) {
      const ids = [];
      for await (const { token } of model.generate(prompt, { ...options, maxNewTokens: tokens })) {
        ids.push(token);
        onToken?.();
      }
      return ids;
    },
  };
}

async function openTransformers({ at, modules, device, threads, prompt, params }) {
  const { AutoModelForCausalLM, Tensor, env } = await import(modules.transformers);
  const cut = at.lastIndexOf("/");
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: at.slice(0, cut + 1) });
  if (!isNode) {
    env.useBrowserCache = false;
    Object.assign(env.backends.onnx.wasm, { wasmPaths: modules.wasmPaths, ...(threads ? { numThreads: threads } : {}) });
  }
  const options = { dtype: "fp32", device, use_external_data_format: false, ...(isNode && threads ? { session_options: { intraOpNumThreads: threads } } : {}) };
  const model = await AutoModelForCausalLM.from_pretrained(at.slice(cut + 1), options);
  const ids = BigInt64Array.from(prompt, BigInt);
  const inputs = { input_ids: new Tensor("int64", ids, [1, ids.length]), attention_mask: new Tensor("int64", ids.map(() => 1n), [1, ids.length]) };
  const given = params.temperature === 0 ? { do_sample: false } : { do_sample: true, temperature: params.temperature, top_k: params.topK };
  return {
    version: `transformers.js ${env.version}`,
    async generate(tokens, onToken) {
      let first = true;
      const streamer = { put() { if (first) first = false; else onToken?.(); }, end() {} }; // the prompt comes first
      const output = await model.generate({ ...inputs, ...given, max_new_tokens: tokens, min_new_tokens: tokens, streamer });
      return Array.from(output.data, Number).slice(prompt.length);
    },
  };
}

if (isNode) console.log(JSON.stringify(await run(JSON.parse(process.argv[2]))));
