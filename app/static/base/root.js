// The path prefix of this server's pages and API: '' or, behind a proxy, such as '/halfstep'.
export const root = globalThis.document?.documentElement.dataset.root ?? ''
