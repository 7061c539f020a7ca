// Ask the built site's own search worker: node search.js SITE QUESTION... prints, per line, the pages it finds, best first.
const fs = require("fs"), path = require("path")
const [site, ...questions] = process.argv.slice(2)
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))
let receive, reply
globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => { receive = listener }
globalThis.postMessage = message => reply(message)
const folder = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(folder).find(name => /^search.*\.js$/.test(name))
require(path.resolve(folder, worker))
const ask = message => new Promise(done => { reply = done; receive({ data: message }) })
const SETUP = 0, QUERY = 2 // SearchMessageType of mkdocs-material
const config = { fields: { title: { boost: 1e3 }, text: { boost: 1 }, tags: { boost: 1e6 } }, ...index.config }
;(async () => {
  await ask({ type: SETUP, data: { ...index, config, options: { suggest: false } } })
  for (const question of questions) {
    const answer = await ask({ type: QUERY, data: question })
    console.log(answer.data.items.map(group => group[0].location.replace(/#.*/, "")).join(" "))
  }
})()
