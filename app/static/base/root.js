// The path below which this server's pages and API lie: '' or, behind a proxy, '/halfstep' say.
export const root = globalThis.document?.documentElement.dataset.root ?? ''
