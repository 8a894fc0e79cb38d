import json,sys,collections,numpy as np
p=sys.argv[1]
d=json.load(open(p)); e=d['traceEvents'] if isinstance(d,dict) else d
print({k:(v if k!='traceEvents' else len(v)) for k,v in d.items()} if isinstance(d,dict) else '')
c=collections.Counter((v.get('cat'),v.get('ph'),v['name'][:60]) for v in e)
for k,n in c.most_common(60): print(n,k)
